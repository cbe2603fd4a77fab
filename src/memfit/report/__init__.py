"""An estimate for people and programs: text, Markdown, JSON. The only place where numbers become words."""
