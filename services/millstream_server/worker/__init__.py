"""Workers: a host for engines of any ability, and the ability to generate text."""
