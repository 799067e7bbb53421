"""`millstream top`: a table of workers and their load that renews itself."""
