"""From the trainer's call to the service: entries are recorded, stored on disk and sent in order."""
