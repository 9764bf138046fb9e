"""The server of an exported model: engine, text, the two protocols, the application."""
