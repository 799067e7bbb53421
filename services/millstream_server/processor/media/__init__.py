"""Images and videos of a conversation: taken in, encoded on workers, placed in the prompt."""
