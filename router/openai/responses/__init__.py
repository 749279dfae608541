"""OpenAI's Responses API, without storage: it reads requests as chats, and writes answers and events."""
