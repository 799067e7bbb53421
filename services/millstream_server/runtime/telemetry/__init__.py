"""What a process reports: logs, metrics, traces, load reports."""
