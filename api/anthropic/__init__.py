"""Anthropic's Messages API: its requests as conversations, and answers as its messages."""
