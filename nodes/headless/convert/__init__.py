"""From the form that the page saves to the form that ComfyUI runs."""
