"""What prefill and decode workers share: settings, engine choice, WorkerService, start and drain."""
