"""OpenAI's Responses API, without a memory."""
