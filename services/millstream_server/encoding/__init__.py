"""What encoding media is: the engine's Protocol, and what it returns."""
