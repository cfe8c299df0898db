"""The changes in their order; a file that a release has carried is never edited again."""
