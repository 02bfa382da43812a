// A replay continues until everything is sent; leaving the page stops it.

document.querySelector("form[data-go-on]").requestSubmit();
