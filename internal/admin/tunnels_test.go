package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"culvert.dev/tunnel"
)

// A fakeRelay is tunnels that can be listed and closed.
type fakeRelay struct {
	open   []tunnel.Live
	closed []uint64
}

func (f *fakeRelay) list() iter.Seq[tunnel.Live] { return slices.Values(f.open) }

func (f *fakeRelay) close(match func(*tunnel.Live) bool) int {
	before := len(f.open)
	f.open = slices.DeleteFunc(f.open, func(l tunnel.Live) bool {
		if !match(&l) {
			return false
		}
		f.closed = append(f.closed, l.ID)
		return true
	})
	return before - len(f.open)
}

func withTunnels() (*Admin, *fakeRelay) {
	f := &fakeRelay{open: lives(time.Now())}
	a := full()
	a.Tunnels, a.CloseTunnels = f.list, f.close
	return a, f
}

// bySocket makes a request one that came by a socket.
func bySocket(r *http.Request) {
	*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(&net.UnixAddr{Net: "unix"})))
}

// byTCP makes it one that did not.
func byTCP(r *http.Request) {
	*r = *r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(&net.TCPAddr{})))
}

func TestTunnelsAreListed(t *testing.T) {
	for _, tt := range []struct {
		target string
		want   []uint64
	}{
		{"/tunnels", []uint64{1, 2, 30, 31}},
		{"/tunnels?limit=3", []uint64{1, 2, 30}},
		{"/tunnels?service=a&limit=1", []uint64{1}},
		{"/tunnels?id=31", []uint64{31}},
		{"/tunnels?id=77", []uint64{}},
		{"/tunnels?older-than=30m", []uint64{1, 30}},
	} {
		a, _ := withTunnels()
		r := ask(a, http.MethodGet, tt.target, byTCP)
		text := body(t, r)
		var list []Tunnel
		if err := json.Unmarshal([]byte(text), &list); err != nil || r.StatusCode != 200 || r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %q, %v: %s", tt.target, r.StatusCode, r.Header.Get("Content-Type"), err, text)
		}
		got := []uint64{}
		for _, l := range list {
			got = append(got, l.ID)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %v, want %v", tt.target, got, tt.want)
		}
		for line := range strings.Lines(text) {
			safe(t, strings.TrimSuffix(line, "\n"))
		}
	}
}

// The fields are a promise.
func TestATunnelHasItsFields(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.FixedZone("", 3600))
	l := lives(now)[1]
	got, err := json.Marshal(newTunnel(&l))
	if err != nil {
		t.Fatal(err)
	}
	const want = `{"id":2,"start":"2026-01-02T02:03:05.000000006Z","ageSeconds":60,"quietSeconds":0,"proto":"connect",` +
		`"listener":"127.0.0.1:3128","source":"[::ffff:192.0.2.8]:4002","peer":"alice","peerMethod":"basic",` +
		`"target":"a.example.com:443","service":"a","pattern":"*.example.com","endpoint":"orders.internal (10.0.0.2:8443)",` +
		`"bytesIn":1048576,"bytesOut":1048576,"halfClosed":true}`
	if string(got) != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestTunnelsAreClosed(t *testing.T) {
	origin := func(r *http.Request) { bySocket(r); r.Header.Set("Origin", "http://127.0.0.1:9090") }
	page := func(r *http.Request) { bySocket(r); r.Header.Set("Sec-Fetch-Site", "same-origin") }
	rebound := func(r *http.Request) { bySocket(r); r.Host = "evil.example" }
	withBody := func(r *http.Request) { bySocket(r); r.ContentLength = 3 }
	for _, tt := range []struct {
		name    string
		method  string
		target  string
		edit    func(*http.Request)
		control bool
		status  int
		want    string // of the body
		closed  []uint64
	}{
		{"one, by socket", "DELETE", "/tunnels/2", bySocket, false, 204, "", []uint64{2}},
		{"one, by TCP", "DELETE", "/tunnels/2", byTCP, false, 403, "adminControl: true or --admin-control\n", nil},
		{"one, by who knows what", "DELETE", "/tunnels/2", nil, false, 403, "not allowed", nil},
		{"one, by TCP with control", "DELETE", "/tunnels/2", byTCP, true, 204, "", []uint64{2}},
		{"one that is not there", "DELETE", "/tunnels/3", bySocket, false, 404, "no tunnel 3 is open\n", nil},
		{"one that is not there, by TCP", "DELETE", "/tunnels/3", byTCP, false, 403, "", nil},
		{"no number", "DELETE", "/tunnels/all", bySocket, false, 400, "\"all\": a tunnel's id is a number from 1\n", nil},
		{"no number, escaped", "DELETE", "/tunnels/%1b%5bm", bySocket, false, 400, "\\x1b[m", nil},
		{"nought", "DELETE", "/tunnels/0", bySocket, false, 400, "", nil},
		{"below a number", "DELETE", "/tunnels/1/2", bySocket, false, 404, "", nil},
		{"nobody", "DELETE", "/tunnels/", bySocket, false, 404, "", nil},
		{"several", "DELETE", "/tunnels?id=31&id=77&id=1", bySocket, false, 200, "{\n  \"closed\": [\n    1,\n    31\n  ]\n}\n", []uint64{1, 31}},
		{"by service", "DELETE", "/tunnels?service=a", bySocket, false, 200, "1,\n    2", []uint64{1, 2}},
		{"by service, by TCP", "DELETE", "/tunnels?service=a", byTCP, false, 403, "", nil},
		{"by service, with control", "DELETE", "/tunnels?service=a", byTCP, true, 200, "", []uint64{1, 2}},
		{"with a limit", "DELETE", "/tunnels?service=a&limit=1", bySocket, false, 200, "", []uint64{1}},
		{"none fits", "DELETE", "/tunnels?service=x", bySocket, false, 200, "{\n  \"closed\": []\n}\n", nil},
		{"all", "DELETE", "/tunnels", bySocket, false, 400, "name the tunnels", nil},
		{"all but for a limit", "DELETE", "/tunnels?limit=2", bySocket, false, 400, "name the tunnels", nil},
		{"a mistake", "DELETE", "/tunnels?service=a&sorce=192.0.2.7", bySocket, false, 400, "unknown filter \"sorce\"", nil},
		{"a filter without a value", "DELETE", "/tunnels?service=", bySocket, false, 400, "no value", nil},
		{"no query", "DELETE", "/tunnels?service=%zz", bySocket, false, 400, "query: ", nil},
		{"from a page", "DELETE", "/tunnels/2", origin, true, 403, "asked by a web page\n", nil},
		{"from our own page", "DELETE", "/tunnels?service=a", page, true, 403, "asked by a web page\n", nil},
		{"by a rebound name", "DELETE", "/tunnels/2", rebound, true, 421, "", nil},
		{"with a body", "DELETE", "/tunnels/2", withBody, true, 400, "the request must not have a body\n", nil},
		{"POST", "POST", "/tunnels/2", bySocket, true, 405, "only GET, HEAD, DELETE\n", nil},
		{"something else", "DELETE", "/status", bySocket, true, 405, "only GET, HEAD\n", nil},
		{"something else that begins like it", "DELETE", "/tunnelsx", bySocket, true, 405, "", nil},
		{"GET of one", "GET", "/tunnels/30", byTCP, false, 200, "\"id\": 30,", nil},
		{"GET of one that is not there", "GET", "/tunnels/3", byTCP, false, 404, "no tunnel 3 is open\n", nil},
		{"GET of a mistake", "GET", "/tunnels?all", byTCP, false, 400, "unknown filter \"all\"", nil},
		{"HEAD", "HEAD", "/tunnels/30", bySocket, true, 200, "", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, f := withTunnels()
			a.Control = func() bool { return tt.control }
			r := ask(a, tt.method, tt.target, tt.edit)
			if got := body(t, r); r.StatusCode != tt.status || !strings.Contains(got, tt.want) {
				t.Errorf("got %d %q, want %d %q", r.StatusCode, got, tt.status, tt.want)
			}
			if !slices.Equal(f.closed, tt.closed) {
				t.Errorf("closed %v, want %v", f.closed, tt.closed)
			}
		})
	}
}

func TestTunnelsAreThereOnlyIfGiven(t *testing.T) {
	for _, method := range []string{"GET", "DELETE"} {
		want := map[string]int{"GET": 404, "DELETE": 405}[method]
		if r := ask(full(), method, "/tunnels", bySocket); r.StatusCode != want {
			t.Errorf("%s of the zero value's: %d, want %d", method, r.StatusCode, want)
		}
	}
	a, _ := withTunnels()
	a.CloseTunnels, a.Control = nil, func() bool { return true }
	if r := ask(a, "DELETE", "/tunnels/2", bySocket); r.StatusCode != 405 || r.Header.Get("Allow") != "GET, HEAD" {
		t.Errorf("DELETE without a way to: %d, Allow %q", r.StatusCode, r.Header.Get("Allow"))
	}
}

// Whoever closes a tunnel is in the log, and what was asked can't forge a line.
func TestAClosedTunnelIsLogged(t *testing.T) {
	a, _ := withTunnels()
	var out buffer
	a.Log = slog.New(slog.NewTextHandler(&out, nil))
	ask(a, "DELETE", "/tunnels?service=a&peer=al%0Aice%1b", bySocket)
	ask(a, "DELETE", "/tunnels/2", bySocket)
	got := out.String()
	for _, want := range []string{`msg="tunnels closed by an operator" asked="/tunnels?service=a&peer=al%0Aice%1b" by="the socket" tunnels=0`, `asked=/tunnels/2 by="the socket" tunnels=1`} {
		if !strings.Contains(got, want) {
			t.Errorf("the log lacks %q: %s", want, got)
		}
	}
}

// brokenWriter takes some bytes and then none.
type brokenWriter struct {
	http.ResponseWriter
	left int
}

func (w *brokenWriter) Write(p []byte) (int, error) {
	if w.left -= len(p); w.left < 0 {
		return 0, errors.New("gone")
	}
	return len(p), nil
}

// A list that nobody reads ends, however long it is.
func TestAListThatIsNotReadEnds(t *testing.T) {
	a, _ := withTunnels()
	l := lives(time.Now())[0]
	a.Tunnels = func() iter.Seq[tunnel.Live] {
		return func(yield func(tunnel.Live) bool) {
			for yield(l) { // for ever
			}
		}
	}
	defer func() {
		if got := recover(); got != http.ErrAbortHandler {
			t.Errorf("got %v, want the connection cut", got)
		}
	}()
	r := httptest.NewRequest("GET", "/tunnels", nil)
	r.Host = "localhost"
	a.Handler().ServeHTTP(&brokenWriter{httptest.NewRecorder(), 1 << 20}, r)
	t.Error("an endless list ended")
}

// A long list is cut off or whole, never both.
func TestALongListIsWhole(t *testing.T) {
	const n = 5000
	a, f := withTunnels()
	one := f.open[1]
	f.open = nil
	for i := range n {
		one.ID = uint64(i + 1)
		f.open = append(f.open, one)
	}
	addr, _ := serve(t, a)
	resp, err := http.Get(fmt.Sprintf("http://%s/tunnels", addr))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	defer http.DefaultClient.CloseIdleConnections()
	var list []Tunnel
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil || len(list) != n || list[n-1].ID != n {
		t.Errorf("%d tunnels, %v; want %d in order", len(list), err, n)
	}
}
