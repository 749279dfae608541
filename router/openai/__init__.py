"""OpenAI's API as pdserve speaks it: requests read, answers and stream chunks written. No sockets."""
