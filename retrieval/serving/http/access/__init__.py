"""Who may do what, and how much: API keys, limits by key or address, and the record of writes."""
