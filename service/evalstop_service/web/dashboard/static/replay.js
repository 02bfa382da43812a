// A replay goes on by itself until all is sent; whoever leaves the page stops it.

document.querySelector("form[data-go-on]").requestSubmit();
