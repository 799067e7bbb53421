"""EngineControlService: what operators do with a worker's engine while it runs."""
