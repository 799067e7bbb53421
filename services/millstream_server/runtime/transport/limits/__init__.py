"""How much connections may hold and do, alone and together, and who pays when it is too much."""
