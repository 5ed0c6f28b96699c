package admin

import (
	"bufio"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// A Tunnel is what /tunnels shows of an open tunnel. Fields may be added;
// those that are here keep their names and meanings.
type Tunnel struct {
	ID         uint64    `json:"id"` // as in the access log
	Start      time.Time `json:"start"`
	Age        float64   `json:"ageSeconds"`
	Quiet      float64   `json:"quietSeconds"` // since a byte moved or a side ended
	Proto      string    `json:"proto"`
	Listener   string    `json:"listener"`
	Source     string    `json:"source"`
	Peer       string    `json:"peer,omitempty"`
	PeerMethod string    `json:"peerMethod,omitempty"`
	Actor      string    `json:"actor,omitempty"` // beside the peer, as in the access log
	Target     string    `json:"target"`
	Service    string    `json:"service"`
	Pattern    string    `json:"pattern"`
	Endpoint   string    `json:"endpoint"`
	BytesIn    int64     `json:"bytesIn"`  // from the client to the service
	BytesOut   int64     `json:"bytesOut"` // from the service to the client
	HalfClosed bool      `json:"halfClosed"`
}

// Closed is what a DELETE of /tunnels answers.
type Closed struct {
	Closed []uint64 `json:"closed"` // IDs, in order
}

func newTunnel(l *tunnel.Live) *Tunnel {
	t := &Tunnel{
		ID: l.ID, Start: l.Start.UTC(), Age: seconds(l.Age), Quiet: seconds(l.Quiet), Proto: l.Proto, Listener: l.Listener,
		Peer: l.Peer.ID, PeerMethod: l.Peer.Method, Target: l.Target, Service: l.Service, Pattern: l.Pattern, Endpoint: l.Endpoint,
		BytesIn: l.In, BytesOut: l.Out, HalfClosed: l.HalfClosed,
	}
	if l.Source.IsValid() {
		t.Source = l.Source.String()
	} else if l.Process != nil {
		t.Source = l.Process.String()
	}
	if actor := actorOf(&l.Peer); actor != nil {
		t.Actor = actor.ID
	}
	return t
}

// seconds is d in seconds, to the millisecond.
func seconds(d time.Duration) float64 { return math.Round(d.Seconds()*1e3) / 1e3 }

// methods are those that r's path takes.
func (a *Admin) methods(r *http.Request) string {
	if a.CloseTunnels != nil && (r.URL.Path == "/tunnels" || strings.HasPrefix(r.URL.Path, "/tunnels/")) {
		return "GET, HEAD, DELETE"
	}
	if a.Sites != nil && strings.HasPrefix(r.URL.Path, sitesPath) {
		return http.MethodPost
	}
	return "GET, HEAD"
}

// tunnels serves /tunnels.
func (a *Admin) tunnels(w http.ResponseWriter, r *http.Request) {
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		text(w, http.StatusBadRequest, "query: "+clean(err.Error(), maxError))
		return
	}
	f, err := ParseTunnelFilter(q)
	if err != nil {
		text(w, http.StatusBadRequest, clean(err.Error(), maxError))
		return
	}
	if r.Method != http.MethodDelete {
		a.list(w, &f)
		return
	}
	if !a.mayClose(w, r) {
		return
	}
	if !f.Narrows() {
		text(w, http.StatusBadRequest, "name the tunnels: DELETE /tunnels/ID, or a filter such as ?service=NAME")
		return
	}
	a.json(w, Closed{a.end(r, &f)})
}

// tunnel serves /tunnels/{id}.
func (a *Admin) tunnel(w http.ResponseWriter, r *http.Request) {
	id, err := parseID(r.PathValue("id"))
	if err != nil {
		text(w, http.StatusBadRequest, fmt.Sprintf("%q: %v", clean(r.PathValue("id"), maxField), err))
		return
	}
	f := TunnelFilter{IDs: []uint64{id}}
	if r.Method == http.MethodDelete {
		if !a.mayClose(w, r) {
			return
		}
		if len(a.end(r, &f)) > 0 {
			w.WriteHeader(http.StatusNoContent)
			return
		}
	} else {
		for l := range a.Tunnels() {
			if l.ID == id {
				a.json(w, newTunnel(&l))
				return
			}
		}
	}
	text(w, http.StatusNotFound, fmt.Sprintf("no tunnel %d is open", id))
}

// list answers with the tunnels that f means, one after the other: there may
// be more of them than one would want to hold as text.
func (a *Admin) list(w http.ResponseWriter, f *TunnelFilter) {
	w.Header().Set("Content-Type", "application/json")
	out := bufio.NewWriterSize(w, 32<<10)
	n, between := 0, "[\n  "
	for l := range a.Tunnels() {
		if !f.Match(&l) {
			continue
		}
		b, err := json.Marshal(newTunnel(&l))
		if err == nil {
			_, _ = out.WriteString(between)
			_, err = out.Write(asciiJSON(b))
		}
		if err != nil {
			// Nobody reads it any more; if someone does, half an array must not
			// look whole.
			panic(http.ErrAbortHandler)
		}
		between = ",\n  "
		if n++; n == f.Limit {
			break
		}
	}
	if n == 0 {
		_, _ = out.WriteString("[")
	}
	_, _ = out.WriteString("\n]\n")
	_ = out.Flush()
}

// end closes the tunnels that f means and returns their IDs.
func (a *Admin) end(r *http.Request, f *TunnelFilter) []uint64 {
	closed := []uint64{}
	a.CloseTunnels(func(l *tunnel.Live) bool {
		if f.Limit > 0 && len(closed) >= f.Limit || !f.Match(l) {
			return false
		}
		closed = append(closed, l.ID)
		return true
	})
	a.log().Info("tunnels closed by an operator", "asked", clean(r.URL.RequestURI(), maxError), "by", caller(r), "tunnels", len(closed))
	return closed
}

// mayClose answers no where r may not change anything.
func (a *Admin) mayClose(w http.ResponseWriter, r *http.Request) bool {
	switch {
	case r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != "":
		text(w, http.StatusForbidden, "asked by a web page")
	case a.Control != nil && a.Control() || overSocket(r):
		return true
	default:
		text(w, http.StatusForbidden, "this is not allowed over TCP, as anyone on this host could do it: "+
			"serve the admin port at a socket with admin: unix:/run/culvert/admin.sock, or allow it with adminControl: true or --admin-control")
	}
	return false
}

// overSocket reports whether r came by a unix socket: its file's permissions
// say who may ask.
func overSocket(r *http.Request) bool {
	addr, ok := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	return ok && addr.Network() == "unix"
}

// caller says where r came from, for the log.
func caller(r *http.Request) string {
	if overSocket(r) {
		return "the socket"
	}
	return clean(r.RemoteAddr, maxField)
}
