"""TOML layers become one frozen, validated `Profile`; the arithmetic of modes."""
