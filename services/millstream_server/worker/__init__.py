"""What prefill and decode workers share: settings, engine, WorkerService, start and drain."""
