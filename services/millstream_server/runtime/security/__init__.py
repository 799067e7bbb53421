"""Who may call a server: TLS, API keys, names in client certificates."""
