"""From TOML layers to one frozen, validated `Profile`, and the arithmetic of modes."""
