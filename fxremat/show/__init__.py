"""Shows plans as text, as HTML pages, as pictures, and in file formats of other tools."""
