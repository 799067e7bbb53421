"""What every service stands on: errors, settings, server bootstrap, health, logging."""
