"""Admission: which requests run now, which wait, which are refused."""
