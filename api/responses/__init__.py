"""OpenAI's Responses API: what it takes, what it answers, and what it remembers."""
