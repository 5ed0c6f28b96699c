package tunnel

import (
	"net/netip"
	"reflect"
	"testing"
	"time"
)

// recordOf returns what a Router keeps of req when it is carried to ep.
func recordOf(r *Router, req *Request, ep Endpoint, attempts ...Attempt) Record {
	o := r.newOutcome(req)
	o.Attempts = attempts
	load, _ := r.Relay.loads.take(loadKey{"svc", "backend"}, nil)
	o.Service, o.Pattern = "svc", "*.example.com"
	return Record{r.newRecord(req, &o, Attempt{Endpoint: ep}, true, lease{load: load})}
}

// TestRecordKeepsWhatWasDecided makes the record of each kind of request, and has it give
// back what the request was decided by.
func TestRecordKeepsWhatWasDecided(t *testing.T) {
	r := &Router{Relay: &Relay{}}
	defer r.Relay.Close()
	alice := Peer{ID: "alice", Method: "basic", Auth: &AuthInfo{Namespace: "shop"}}
	ep := Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:5432"), Host: "db.internal"}
	failed := Attempt{Endpoint: Endpoint{Addr: netip.MustParseAddrPort("10.0.0.2:5432")}, Err: Refusef(DialFailed, "refused")}
	for _, c := range []struct {
		name     string
		change   func(*Request)
		load     *EndpointLoad
		attempts []Attempt
		want     record
	}{
		{"a name and a port", func(q *Request) { q.Name, q.Port = MustParseName("db.example.com"), 5432 }, nil, nil, &tunnelInfo{}},
		{"a name, at a port of its own", func(q *Request) { q.Name, q.LocalPort, q.ListenerOnly = MustParseName("db.example.com"), 5432, true }, nil, nil, &tunnelInfo{}},
		{"IPv4", func(q *Request) { q.Addr, q.Port = netip.MustParseAddr("192.0.2.1"), 5432 }, nil, nil, &tunnelInfo{}},
		{"IPv6", func(q *Request) { q.Addr, q.Port = netip.MustParseAddr("2001:db8::1"), 5432 }, nil, nil, &tunnelInfo{}},
		{"IPv6 without a port", func(q *Request) { q.Addr = netip.MustParseAddr("2001:db8::1") }, nil, nil, &tunnelInfo{}},
		{"TLS that was ended", func(q *Request) { q.Name, q.TLS, q.DeferIdentity = MustParseName("db.example.com"), &EndedTLS{}, true }, nil, nil, &tunnelInfo{}},
		{"an endpoint that is counted", func(q *Request) { q.Name = MustParseName("db.example.com") }, &EndpointLoad{}, nil, &loadedInfo{}},
		{"a caller", func(q *Request) { q.Name, q.Peer = MustParseName("db.example.com"), alice }, nil, nil, &identifiedInfo{}},
		{"a caller and an endpoint that is counted", func(q *Request) { q.Name, q.Peer = MustParseName("db.example.com"), alice }, &EndpointLoad{}, nil, &identifiedInfo{}},
		{"a second attempt", func(q *Request) { q.Name, q.Peer = MustParseName("db.example.com"), alice }, nil, []Attempt{failed}, &largeInfo{}},
		{"an address with a zone", func(q *Request) {
			q.Name, q.Source = MustParseName("db.example.com"), netip.MustParseAddrPort("[fe80::1%eth0]:9")
		}, nil, nil, &largeInfo{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := &Request{
				Proto: "connect", Listener: ":443", LocalPort: 443, Source: netip.MustParseAddrPort("198.51.100.7:1000"),
				ALPN: []string{"h2"}, Start: time.Unix(1_700_000_000, 5),
			}
			c.change(req)
			ep := ep
			ep.Load = c.load
			rec := recordOf(r, req, ep, c.attempts...)
			if got, want := reflect.TypeOf(rec.of), reflect.TypeOf(c.want); got != want {
				t.Errorf("the record is a %v, want %v", got, want)
			}
			var got Request
			route, ok := rec.Request(&got)
			if !ok || !reflect.DeepEqual(&got, req) {
				t.Errorf("request: got %+v, %v, want %+v", got, ok, *req)
			}
			if got := rec.Listener(); got != ":443" {
				t.Errorf("listener %q, want :443", got)
			}
			if k := rec.Service(); k != (ServiceKey{"svc", "backend"}) || rec.Peer() != req.Peer {
				t.Errorf("service %v, peer %v, want svc, backend, %v", k, rec.Peer(), req.Peer)
			}
			if route.Service != "svc" || route.Backend != "backend" || route.Pattern != "*.example.com" ||
				len(route.Endpoints) != 1 || route.Endpoints[0].Addr != ep.Addr || route.Endpoints[0].Host != ep.Host {
				t.Errorf("route: got %+v", route)
			}
			// What the list shows is what the Outcome says.
			o, v := rec.of.outcome(), Live{}
			rec.of.describe(&v)
			want := Live{
				ID: o.ID, Start: o.Start, Age: v.Age, Proto: o.Proto, Listener: o.Listener, Source: o.Source, Peer: o.Peer,
				Target: o.Target, Service: o.Service, Pattern: o.Pattern, Endpoint: o.Endpoint,
			}
			if v != want || v.Peer != req.Peer || v.Age <= 0 {
				t.Errorf("listed: got %+v, want %+v", v, want)
			}
		})
	}
}

// BenchmarkEndRecords looks at 100,000 tunnels, of a thousand services, and ends one.
func BenchmarkEndRecords(b *testing.B) {
	const n = 100_000
	r := &Router{Relay: &Relay{}}
	defer r.Relay.Close()
	req := &Request{Proto: "connect", Listener: ":443", Name: MustParseName("db.example.com"), Source: netip.MustParseAddrPort("198.51.100.7:1000")}
	for i := range n {
		req.Peer = Peer{}
		if i%2 == 0 {
			req.Peer = Peer{ID: "spiffe://corp.example/ns/shop/sa/api", Method: "mtls"}
		}
		s := &Session{router: r, record: recordOf(r, req, Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:5432")}).of}
		s.carrier = ender{s}
		r.Relay.sessions.add(s)
	}
	for _, c := range []struct {
		name string
		end  func(id uint64) int
	}{
		{"EndRecords", func(id uint64) int {
			return r.Relay.EndRecords(Killed, func(rec Record) bool { return rec.of.requestID() == id })
		}},
		{"EndFunc", func(id uint64) int { return r.Relay.EndFunc(Killed, func(v *Live) bool { return v.ID == id }) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for i := range b.N {
				c.end(uint64(i))
			}
		})
	}
}

// An ender carries a Session that counts nothing.
type ender struct{ s *Session }

func (ender) Progress() (in, out int64, moved time.Time) { return }
func (e ender) Kill(Reason)                              { e.s.ended.Store(true); e.s.router.Relay.sessions.remove(e.s) }
