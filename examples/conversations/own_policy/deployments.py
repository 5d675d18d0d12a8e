"""A confirmation policy in a package: a person is asked before anything is deployed."""


class Deployments:
    """Ask about commands with certain words; `settings` are those of the `ConfirmationPolicy`."""

    def __init__(self, settings):
        self.words = settings.get("words", ["deploy"])

    def needs_confirmation(self, action, risk):
        """Say whether a person is asked."""
        return any(word in getattr(action, "command", "") for word in self.words)
