"""Encodes images and videos with transformers' processors and vision towers; embeds and ranks.

The SGLang adapter uses the same processors, so every encoder makes the same tokens of an item.
"""
