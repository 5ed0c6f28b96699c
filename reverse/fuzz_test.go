package reverse

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"culvert.dev/tunnel"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// maxFuzzed is how many bytes a peer sends in a fuzz target.
const maxFuzzed = 32 << 10

// frames returns the bytes that f writes.
func frames(f func(*http2.Framer)) []byte {
	var b bytes.Buffer
	f(http2.NewFramer(&b, nil))
	return b.Bytes()
}

// heads returns a block of header fields.
func heads(fields ...string) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for i := 0; i+1 < len(fields); i += 2 {
		_ = e.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return b.Bytes()
}

// asker is what a gateway sends to ask for a name by stream id.
func asker(fr *http2.Framer, id uint32, authority string) {
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: heads(":method", "CONNECT", ":authority", authority), EndHeaders: true})
}

// noPanic is a log that fails the test where a panic was recovered.
func noPanic(t *testing.T) *slog.Logger {
	return slog.New(slog.NewTextHandler(writerFunc(func(b []byte) (int, error) {
		if bytes.Contains(b, []byte("panic")) {
			t.Errorf("%s", b)
		}
		return len(b), nil
	}), nil))
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// FuzzServerSession: whatever a connector sends behind its hello, in whatever order, ends its
// own session at most, and leaves no name with a session.
func FuzzServerSession(f *testing.F) {
	f.Add([]byte{})
	f.Add(frames(func(fr *http2.Framer) {
		_ = fr.WriteSettings()
		_ = fr.WriteSettingsAck()
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: heads(":status", "200"), EndHeaders: true})
		_ = fr.WriteData(1, false, []byte(`{"kind":"ping"}`+"\n"+`{"kind":"register","register":[{"name":"other.example"},{"name":"*.other.example","port":8443}]}`+"\n"))
		_ = fr.WriteData(1, false, []byte(`{"kind":"register","register":[{"name":"other.example"}],"more":true}`+"\n"+`{"kind":"ping"}`+"\n"+`{"kind":"register","register":[{"name":"cam.edge.example"}],"more":true}`+"\n"+`{"kind":"register"}`+"\n"))
		_ = fr.WriteData(1, false, []byte(`{"kind":"tickets","count":1000000}`+"\n"+`{"kind":"tickets","count":-5}`+"\n"+`{"kind":"tickets","tickets":[{"id":1}]}`+"\n"))
		_ = fr.WriteData(1, false, []byte(`{"kind":"drain"}`+"\n"))
		_ = fr.WriteData(1, false, []byte(`{"kind":"tickets","count":1}`+"\n"))
		_ = fr.WriteWindowUpdate(0, 1<<20)
		_ = fr.WriteData(1, true, nil)
	}))
	f.Add(frames(func(fr *http2.Framer) {
		_ = fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}, http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 0})
		_ = fr.WriteRSTStream(1, http2.ErrCodeCancel)
		_ = fr.WriteGoAway(1, http2.ErrCodeNo, nil)
	}))
	f.Add(frames(func(fr *http2.Framer) {
		_ = fr.WriteSettings()
		_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: heads(":status", "503"), EndHeaders: true, EndStream: true})
		_ = fr.WriteData(3, false, make([]byte, 1<<10))
		_ = fr.WritePing(false, [8]byte{1})
	}))
	f.Fuzz(func(t *testing.T, sent []byte) {
		if len(sent) > maxFuzzed {
			return
		}
		g := newTestGateway(t)
		g.groups.Log = noPanic(t)
		conn, err := g.Dial(t.Context(), &tunnel.Endpoint{Host: Name.String(), Addr: netip.MustParseAddrPort("0.0.0.0:443")}, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		var reading sync.WaitGroup
		defer reading.Wait()
		reading.Go(func() { _, _ = io.Copy(io.Discard, conn) })
		first, err := json.Marshal(hello{Version: version, Connector: "fuzzed", Register: []Registration{named("cam.edge.example")}})
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(pollLimit))
		_, _ = conn.Write(slices.Concat(first, []byte("\n"), sent))
		_ = conn.(*net.TCPConn).CloseWrite()
		eventually(t, "the session has ended", func() bool { return len(g.outcomes()) == 1 })
		if got := g.outcomes()[0]; got == tunnel.Internal {
			t.Errorf("the session ended with %q", got)
		}
		for _, l := range g.groups.List() {
			if len(l.Members) > 0 {
				t.Errorf("%q has %d sessions after the only one has ended", l.Name, len(l.Members))
			}
		}
	})
}

// A fuzzedGateway sends the same bytes as the answer to the first session, and lets no other
// one be opened.
type fuzzedGateway struct {
	sent   []byte
	opened atomic.Bool
	over   chan struct{} // closed at the end of the first session
	ending sync.WaitGroup
}

func (g *fuzzedGateway) Dial(ctx context.Context, _ *tunnel.Endpoint, _ *tunnel.Request) (net.Conn, error) {
	if g.opened.Swap(true) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	near, far, err := tcpPair(ctx)
	if err != nil {
		return nil, err
	}
	g.ending.Go(func() {
		defer close(g.over)
		defer far.Close()
		_ = far.SetDeadline(time.Now().Add(pollLimit))
		_, _ = far.Write(g.sent)
		_ = far.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, far)
	})
	return near, nil
}

// dialPool is how the connector opens pool connections, which g reads until they end.
func (g *fuzzedGateway) dialPool(ctx context.Context) (net.Conn, error) {
	near, far, err := tcpPair(ctx)
	if err != nil {
		return nil, err
	}
	g.ending.Go(func() {
		defer far.Close()
		_ = far.SetDeadline(time.Now().Add(pollLimit))
		_, _ = io.Copy(io.Discard, far)
	})
	return near, nil
}

func (*fuzzedGateway) Check(*tunnel.Endpoint) error { return nil }

func (*fuzzedGateway) Info() tunnel.TransportInfo { return tunnel.TransportInfo{} }

// FuzzClientSession: whatever a gateway sends behind its welcome, in whatever order, ends the
// session at most, and the connector goes on.
func FuzzClientSession(f *testing.F) {
	ok := `{"version":1,"replica":"r","names":[{"name":"cam.edge.example"}]}` + "\n"
	f.Add([]byte(ok))
	f.Add([]byte(`{"version":1,"same":true}` + "\n"))
	f.Add([]byte(`{"version":1,"error":"no"}` + "\n"))
	f.Add(slices.Concat([]byte(ok), []byte(http2.ClientPreface), frames(func(fr *http2.Framer) {
		_ = fr.WriteSettings()
		asker(fr, 1, controlName.String()+":443")
		_ = fr.WriteData(1, false, []byte(`{"kind":"ping"}`+"\n"+`{"kind":"registered","names":[{"name":"cam.edge.example","reason":"denied"}]}`+"\n"))
		asker(fr, 3, "cam.edge.example:443")
		_ = fr.WriteData(3, true, []byte("a request"))
		asker(fr, 5, "cam.edge.example:443")
		_ = fr.WriteRSTStream(5, http2.ErrCodeCancel)
		_ = fr.WriteData(1, false, []byte(`{"kind":"drain"}`+"\n"))
		_ = fr.WriteData(1, true, nil)
	})))
	f.Add(slices.Concat([]byte(ok), []byte(http2.ClientPreface), frames(func(fr *http2.Framer) {
		_ = fr.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		for id := uint32(1); id < 32; id += 2 {
			asker(fr, id, controlName.String()+":443")
			_ = fr.WriteRSTStream(id, http2.ErrCodeCancel)
		}
		_ = fr.WriteGoAway(0, http2.ErrCodeEnhanceYourCalm, nil)
	})))
	f.Add(slices.Concat([]byte(ok), []byte(http2.ClientPreface), frames(func(fr *http2.Framer) {
		_ = fr.WriteSettings()
		asker(fr, 1, controlName.String()+":443")
		one := `{"id":7,"ticket":"` + strings.Repeat("A", 43) + `="}`
		_ = fr.WriteData(1, false, []byte(`{"kind":"tickets","tickets":[`+one+","+one+`,{"id":8,"ticket":"AA=="}]}`+"\n"+`{"kind":"tickets","tickets":[`+one+`]}`+"\n"))
		for id, field := range map[uint32]string{3: "7", 5: "7", 7: "99999999999999999999", 9: "-1"} {
			_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: heads(":method", "CONNECT", ":authority", "cam.edge.example:443", poolField, field), EndHeaders: true})
		}
		_ = fr.WriteData(1, true, nil)
	})))
	f.Fuzz(func(t *testing.T, sent []byte) {
		if len(sent) > maxFuzzed {
			return
		}
		g := &fuzzedGateway{sent: sent, over: make(chan struct{})}
		c := &Client{Handler: echo, Log: noPanic(t), Budget: &tunnel.Budget{Limit: 100}, Gateways: []Gateway{{Name: "gw", Transport: g, Pool: 2, DialPool: g.dialPool}}}
		c.SetNames([]Registration{named("cam.edge.example")})
		stop := run(t, c)
		eventually(t, "the session has ended", func() bool {
			select {
			case <-g.over:
				return true
			default:
				return false
			}
		})
		stop()
		g.ending.Wait()
		if n := c.Budget.Used(); n != 0 {
			t.Errorf("%d descriptors are taken after the end", n)
		}
	})
}

// FuzzReplica: whatever another replica tells, in whatever order, nothing of it serves a name
// once the stream has ended, and a name always has an owner.
func FuzzReplica(f *testing.F) {
	f.Add(`{"generation":1,"names":[{"name":"cam.edge.example","owner":"spiffe://corp.example/edge","since":1,"serves":[{"weight":1,"sessions":1}]}]}
{}
{"generation":2,"names":[{"name":"*.edge.example","owner":"spiffe://corp.example/edge","since":5,"serves":[{"group":"g","port":443,"weight":3,"sessions":2}]}],"draining":true}
{"generation":3,"removed":["cam.edge.example"]}
`)
	f.Add(`{"generation":1,"names":[{"name":"mine.example","owner":"spiffe://corp.example/thief","since":1,"serves":[{"weight":1,"sessions":1}]}]}
{"generation":2,"names":[{"name":"mine.example","owner":"spiffe://corp.example/own","since":1,"left":600}]}
`)
	f.Add(`{"generation":2}` + "\n")
	f.Add(`{"generation":1,"removed":["x.example","*.x.example"]}` + "\n")
	f.Add(`{"others":[{"replica":"a","address":"192.0.2.2"},{"replica":"b","address":"::ffff:192.0.2.3"},{"replica":"c","address":"127.0.0.1"},{"replica":"d","address":"fe80::1%eth0"},{"replica":"e","address":""},{"address":"192.0.2.4"}]}` + "\n" + `{"others":[]}` + "\n")
	f.Fuzz(func(t *testing.T, sent string) {
		if len(sent) > maxFuzzed {
			return
		}
		groups := &Groups{Authorize: anything, Log: noPanic(t)}
		server := &Server{Groups: groups, Router: &tunnel.Router{}}
		r := &Replicas{Server: server, Log: noPanic(t)}
		m, err := groups.Join(by("spiffe://corp.example/own"), &fakeSession{}, named("mine.example"))
		if err != nil {
			t.Fatal(err)
		}
		defer m.Leave()
		l := &replicaLink{replicas: r, address: "192.0.2.1:443"}
		if !l.join("other") {
			t.Fatal("the replica has a stream already")
		}
		near, far := net.Pipe()
		defer near.Close()
		defer far.Close()
		if err := l.read(near, bufio.NewReader(strings.NewReader(sent))); err == nil {
			t.Error("the stream has not ended")
		}
		for _, o := range l.learned() {
			if why, forbidden := tunnel.Forbidden(o.Address); !o.Address.IsValid() || forbidden || o.Address.Zone() != "" {
				t.Errorf("%s would be asked: %s", o.Address, why)
			}
		}
		l.leave()
		for _, n := range groups.List() {
			if len(n.Remote) > 0 {
				t.Errorf("%q is served by a replica whose stream has ended", n.Name)
			}
			if n.Owner == "" {
				t.Errorf("%q has no owner", n.Name)
			}
		}
		groups.mu.RLock()
		defer groups.mu.RUnlock()
		if len(groups.remote) > 0 {
			t.Errorf("%d groups have members at a replica whose stream has ended", len(groups.remote))
		}
	})
}
