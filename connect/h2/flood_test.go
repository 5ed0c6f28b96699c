package h2

import (
	"bytes"
	"context"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestFloods sends frames that cost the sender less than the receiver until
// the connection ends: with ENHANCE_YOUR_CALM, and within the budget.
func TestFloods(t *testing.T) {
	id := uint32(1) // of the last stream
	// A field of 3 KiB in the dynamic table, and then a request that refers to
	// it as often as fits into a frame: 48 MiB of header list in 16 KiB.
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	_ = enc.WriteField(hpack.HeaderField{Name: "x", Value: strings.Repeat("x", 3<<10)})
	plant := append(fieldList(connectSvc...), block.Bytes()...)
	bomb := append(fieldList(connectSvc...), bytes.Repeat([]byte{0x80 | 64}, maxFrame-100)...) // behind its own two fields
	large := append(fieldList(connectSvc...), fillerBlock(12 << 10)[len(fieldList(connectSvc...)):]...)
	refused := append(fieldList(":method", "CONNECT", ":authority", "nobody:1"), large[len(fieldList(connectSvc...)):]...)
	for _, c := range []struct {
		name   string
		first  func(r *raw)
		repeat func(r *raw) error
	}{
		{"rapid reset, CVE-2023-44487", nil, func(r *raw) error {
			id += 2
			_ = r.connect(id, "slow:1")
			return r.fr.WriteRSTStream(id, http2.ErrCodeCancel)
		}},
		{"resets that the server is made to send, CVE-2025-8671", nil, func(r *raw) error {
			id += 2
			_ = r.connect(id, "svc:1")
			return r.fr.WriteWindowUpdate(id, 0)
		}},
		{"malformed requests", nil, func(r *raw) error { id += 2; return r.connect(id, "svc:1", ":path", "/") }},
		{"requests that are refused", nil, func(r *raw) error { id += 2; return r.connect(id, "nobody:1") }},
		{"passwords that are guessed", nil, func(r *raw) error {
			id += 2
			return r.connect(id, "svc:1", "proxy-authorization", "Bearer guess")
		}},
		{"requests over the limit of streams", nil, func(r *raw) error { id += 2; return r.connect(id, "svc:1") }},
		{"HPACK bomb", func(r *raw) {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: plant, EndHeaders: true})
		}, func(r *raw) error {
			id += 2
			return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: bomb, EndHeaders: true})
		}},
		{"requests of 12 KiB that are refused", nil, func(r *raw) error {
			id += 2
			return r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: refused, EndHeaders: true})
		}},
		{"requests of 12 KiB that are aborted", nil, func(r *raw) error {
			id += 2
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: large, EndHeaders: true})
			return r.fr.WriteRSTStream(id, http2.ErrCodeCancel)
		}},
		{"SETTINGS, CVE-2019-9515", nil, func(r *raw) error { return r.fr.WriteSettings() }},
		{"PING, CVE-2019-9512", nil, func(r *raw) error { return r.fr.WritePing(false, [8]byte{}) }},
		{"PRIORITY, CVE-2019-9513", nil, func(r *raw) error {
			return r.fr.WritePriority(1, http2.PriorityParam{StreamDep: 3, Weight: 1})
		}},
		{"empty DATA, CVE-2019-9518", func(r *raw) { _ = r.connect(1, "svc:1") }, func(r *raw) error { return r.fr.WriteData(1, false, nil) }},
		{"padded DATA without a byte", func(r *raw) { _ = r.connect(1, "svc:1") }, func(r *raw) error {
			return r.fr.WriteDataPadded(1, false, nil, make([]byte, 3))
		}},
		{"empty CONTINUATION, CVE-2023-45288", func(r *raw) {
			_ = r.fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: fieldList(connectSvc...)})
		}, func(r *raw) error { return r.fr.WriteContinuation(1, false, nil) }},
		{"WINDOW_UPDATE", func(r *raw) { _ = r.connect(1, "svc:1") }, func(r *raw) error { return r.fr.WriteWindowUpdate(0, 1) }},
		{"unknown frames", nil, func(r *raw) error { return r.fr.WriteRawFrame(0x77, 0, 0, nil) }},
		{"GOAWAY", nil, func(r *raw) error { return r.fr.WriteGoAway(0, http2.ErrCodeNo, nil) }},
		{"acknowledgements", nil, func(r *raw) error { return r.fr.WriteSettingsAck() }},
	} {
		t.Run(c.name, func(t *testing.T) {
			id = 1
			// A pipe holds nothing: what is sent has been read.
			near, far := net.Pipe()
			defer near.Close()
			ended := make(chan error, 1)
			p := new(Protocol)
			if c.name == "passwords that are guessed" {
				p.Auth = &connect.Bearer{Verify: connect.Tokens(map[string]string{"ci": "t0ken"})}
			}
			go func() {
				ended <- p.ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(ctx context.Context, req *tunnel.Request) {
					switch req.Host() {
					case "svc":
						_, _ = req.Accept()
					case "slow":
						<-ctx.Done()
					default:
						req.Refuse(tunnel.Refusef(tunnel.NoRoute, "no"))
					}
				}))
			}()
			r := newRaw(t, near)
			r.mum = true
			heard := make(chan answer, 1)
			go func() {
				defer close(heard)
				heard <- r.answer(0)
			}()
			_, _ = io.WriteString(near, preface)
			_ = r.fr.WriteSettings()
			if c.first != nil {
				c.first(r)
			}
			const enough = 20_000
			sent := 0
			for sent < enough && c.repeat(r) == nil {
				sent++
			}
			if sent == enough {
				t.Fatalf("%d frames got through, and the connection does not end", sent)
			}
			if a := <-heard; a.goAway != http2.ErrCodeEnhanceYourCalm || !a.closed {
				t.Errorf("got GOAWAY with %v, closed %v, want ENHANCE_YOUR_CALM and a close", a.goAway, a.closed)
			}
			most := budget + 200
			switch c.name {
			case "requests that are refused":
				most = budget/mux.CostRefused + 200
			case "requests of 12 KiB that are refused":
				most = budget/12 + 20 // each takes a tenth of a millisecond
			case "HPACK bomb":
				most = budget/(2*(costList+15)) + 10 // each takes the receiver more than half a millisecond
			}
			if sent > most {
				t.Errorf("%d frames got through", sent)
			}
			want := tunnel.Flood
			if strings.Contains(c.name, "CVE-2023-45288") {
				want = tunnel.TooLarge // the limit of a block comes first
			}
			tunneltest.WantReason(t, <-ended, want)
		})
	}
}

// TestFloodHarmsNobodyElse: a connection that floods ends, and the one beside
// it does not notice.
func TestFloodHarmsNobodyElse(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Protocol{})
	bystander := open(t, newDialer(t, g.Addr), "svc:1")
	r := rawClient(t, g.Addr)
	r.mum = true
	heard := make(chan answer, 1)
	go func() {
		defer close(heard)
		heard <- r.answer(0)
	}()
	for r.fr.WritePing(false, [8]byte{}) == nil {
		testnet.Ping(t, bystander, "still here")
	}
	_ = r.Close()
	<-heard
	g.Reason(t, tunnel.Flood)
	testnet.Ping(t, bystander, "and after")
}

// TestAnswersThatAreNotRead: what the peer makes us say is bounded, whether
// it listens or not.
func TestAnswersThatAreNotRead(t *testing.T) {
	near, far := net.Pipe() // without a buffer
	defer near.Close()
	done := make(chan error, 1)
	go func() {
		done <- new(Protocol).ServeConn(t.Context(), tunnel.NewConn(far), tunnel.HandlerFunc(func(_ context.Context, req *tunnel.Request) {}))
	}()
	_ = near.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(near, preface)
	fr := http2.NewFramer(near, near)
	var err error
	n := 0
	for err = fr.WriteSettings(); err == nil && n < 10_000; n++ {
		err = fr.WritePing(false, [8]byte{})
	}
	if err == nil || n > 2*budget {
		t.Errorf("%d PINGs were taken, and then %v", n, err)
	}
	if got := tunnel.ReasonOf(<-done); got != tunnel.Flood {
		t.Errorf("got reason %s, want flood", got)
	}
}
