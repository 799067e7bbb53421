"""How models write reasoning and tool calls: a table per format, one streaming parser for all."""
