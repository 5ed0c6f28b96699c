package admin

import (
	"io"
	"net/http"
	"net/url"
)

// sitesPath is where operators ask for what concerns other sites.
const sitesPath = "/sites/"

// maxForm is how large a form may be, in bytes.
const maxForm = 64 << 10

// sites serves /sites/WHAT. What is asked is in the body: a token is a secret, which a path
// is not.
func (a *Admin) sites(w http.ResponseWriter, r *http.Request) {
	if !a.mayClose(w, r) {
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxForm))
	if err != nil {
		text(w, http.StatusBadRequest, "the form can't be read, or is too long")
		return
	}
	q, err := url.ParseQuery(string(body))
	if err != nil {
		text(w, http.StatusBadRequest, "the body is not a form") // and is not quoted
		return
	}
	v, err := a.Sites(r.Context(), r.PathValue("what"), q)
	if err != nil {
		text(w, http.StatusBadRequest, clean(err.Error(), maxError))
		return
	}
	a.json(w, v)
}
