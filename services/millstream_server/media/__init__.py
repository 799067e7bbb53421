"""Images and videos in plain types: what they are, how they are decoded, how models place them."""
