"""From the trainer's call to the service: recorded, kept on disk, sent in order."""
