"""From samples to token ids: templates, chats, labels."""
