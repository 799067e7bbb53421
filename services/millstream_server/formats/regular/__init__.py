"""Grammars that are as good as one regular expression: read, and written for xgrammar."""
