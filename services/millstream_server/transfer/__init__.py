"""How prefill and decode workers come to trust each other: hand-off tickets."""
