package delegation

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A handler gets the caller of a request that has one assertion, and never the assertion.
func TestMiddleware(t *testing.T) {
	w := newWorld(t)
	gateway, service := w.session(t)
	token, err := signer(t, gatewayID, w.gateway).Sign(assertion(t, gateway))
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name     string
		fields   http.Header
		tls      *tls.ConnectionState
		optional bool
		status   int
		body     string // of a refusal
		nobody   bool
	}{
		{name: "an assertion", fields: http.Header{"Culvert-Peer": {token}}, tls: service, status: 200},
		{name: "none", tls: service, status: 403, body: "Culvert-Peer: missing"},
		{name: "none, optional", tls: service, optional: true, status: 200, nobody: true},
		{name: "two", fields: http.Header{"Culvert-Peer": {token, token}}, tls: service, status: 403, body: "Culvert-Peer: malformed"},
		{name: "two in one", fields: http.Header{"Culvert-Peer": {token + ", " + token}}, tls: service, status: 403, body: "Culvert-Peer: malformed"},
		{name: "with an underscore", fields: http.Header{"Culvert_peer": {token}}, tls: service, status: 403, body: "Culvert-Peer: malformed"},
		{name: "beside one with an underscore", fields: http.Header{"Culvert-Peer": {token}, "Culvert_Peer": {"x"}}, tls: service, status: 403, body: "Culvert-Peer: malformed"},
		{name: "in another case", fields: http.Header{"culvert-peer": {token}}, tls: service, optional: true, status: 403, body: "Culvert-Peer: malformed"},
		{name: "empty", fields: http.Header{"Culvert-Peer": {""}}, tls: service, optional: true, status: 403, body: "Culvert-Peer: missing"},
		{name: "without TLS", fields: http.Header{"Culvert-Peer": {token}}, status: 403, body: "Culvert-Peer: no-binding"},
		{name: "wrong, optional", fields: http.Header{"Culvert-Peer": {"a.b.c"}}, tls: service, optional: true, status: 403, body: "Culvert-Peer: malformed"},
	} {
		v := w.verifier()
		v.Optional = row.optional
		served := false
		h := v.Middleware(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			served = true
			if a := FromContext(r.Context()); row.nobody != (a == nil) || a != nil && a.Subject != callerID {
				t.Errorf("%s: got %+v, want the caller", row.name, a)
			}
			for name := range r.Header {
				if isField(name) {
					t.Errorf("%s: the handler sees %q", row.name, name)
				}
			}
			if len(r.Trailer["Culvert-Peer"]) > 0 || r.Header.Get("Accept") != "text/plain" {
				t.Errorf("%s: got the fields %v and %v", row.name, r.Header, r.Trailer)
			}
		}))
		r := httptest.NewRequest("GET", "https://shop.test/", nil)
		r.TLS = row.tls
		r.Trailer = http.Header{"Culvert-Peer": {"x"}}
		for name, values := range row.fields {
			r.Header[name] = values
		}
		r.Header.Set("Accept", "text/plain")
		answer := httptest.NewRecorder()
		h.ServeHTTP(answer, r)
		if answer.Code != row.status || served != (row.status == 200) || strings.TrimSpace(answer.Body.String()) != row.body {
			t.Errorf("%s: got %d %q, want %d %q", row.name, answer.Code, answer.Body, row.status, row.body)
		}
		if row.status == 403 && strings.Contains(answer.Body.String(), gatewayID) {
			t.Errorf("%s: the answer names a gateway: %q", row.name, answer.Body)
		}
	}
	v := w.verifier()
	v.Refused = func(w http.ResponseWriter, _ *http.Request, err error) {
		w.Header().Set("X-Reason", string(reason(err)))
		w.WriteHeader(http.StatusUnauthorized)
	}
	answer := httptest.NewRecorder()
	v.Middleware(http.NotFoundHandler()).ServeHTTP(answer, httptest.NewRequest("GET", "/", nil))
	if got := answer.Header().Get("X-Reason"); answer.Code != 401 || got != "missing" {
		t.Errorf("got %d and %q, want Refused to answer", answer.Code, got)
	}
}
