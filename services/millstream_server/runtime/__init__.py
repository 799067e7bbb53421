"""What every service uses: errors, settings, RPCs, security, telemetry, start and stop."""
