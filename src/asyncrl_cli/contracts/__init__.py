"""What crosses a process or a room: frozen dataclasses and Protocols. A prompt group's way is written in
these types."""
