"""What the offline scheduler decides, apart from SGLang: pure Python and numpy."""
