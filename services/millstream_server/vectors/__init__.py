"""Texts to vectors and scores, in plain types: requests, outputs, the engines' Protocol."""
