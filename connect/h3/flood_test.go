package h3

import (
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"culvert.dev/connect"
	"culvert.dev/connect/internal/mux"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// TestFloods sends what costs the sender less than the receiver until the
// connection ends: with H3_EXCESSIVE_LOAD, and within the budget.
func TestFloods(t *testing.T) {
	for _, c := range []struct {
		name   string
		first  func(r *raw) *rawStream // may be nil
		repeat func(r *raw, s *rawStream) error
	}{
		{"rapid reset, CVE-2023-44487", nil, func(r *raw, _ *rawStream) error {
			return r.try(headOf(connectSvc...), true)
		}},
		{"resets without a request", nil, func(r *raw, _ *rawStream) error { return r.try(nil, true) }},
		{"malformed requests", nil, func(r *raw, _ *rawStream) error { return r.try(headOf(with(":path", "/")...), false) }},
		{"requests that are refused, and not waited for", nil, func(r *raw, _ *rawStream) error {
			return r.try(headOf(":method", "CONNECT", ":authority", "nobody:1"), true)
		}},
		{"requests of 12 KiB that are refused", nil, func(r *raw, _ *rawStream) error {
			return r.try(headOf(":method", "CONNECT", ":authority", "nobody:1", "x", strings.Repeat("~", 9<<10)), false)
		}},
		{"passwords that are guessed", nil, func(r *raw, _ *rawStream) error {
			return r.try(headOf(":method", "CONNECT", ":authority", "svc:1", "proxy-authorization", "Bearer guess"), false)
		}},
		{"streams of unknown types", nil, func(r *raw, _ *rawStream) error {
			s, err := r.openUni()
			if err == nil {
				_, err = s.Write([]byte{0x21})
				s.CancelWrite(0)
			}
			if r.qc.Context().Err() == nil {
				return nil
			}
			return err
		}},
		{"frames on the control stream", nil, func(r *raw, _ *rawStream) error { return nil }},
		{"empty DATA, CVE-2019-9518", tunnelOf, func(_ *raw, s *rawStream) error { _, err := s.qs.Write(varints(frameData, 0)); return err }},
		{"unknown frames in a tunnel", tunnelOf, func(_ *raw, s *rawStream) error { _, err := s.qs.Write(varints(0x21, 0)); return err }},
		{"unknown frames before a request", func(r *raw) *rawStream { return r.open(nil) }, func(_ *raw, s *rawStream) error { _, err := s.qs.Write(varints(0x21, 0)); return err }},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := &Server{}
			if c.name == "passwords that are guessed" {
				server.Auth = &connect.Bearer{Verify: connect.Tokens(map[string]string{"ci": "t0ken"})}
			}
			g := serve(t, tunneltest.Table{"svc:1": testnet.Discard(t).Addr()}, server)
			r := rawClient(t, g.addr)
			control := r.begin()
			var s *rawStream
			if c.first != nil {
				s = c.first(r)
			}
			start := time.Now()
			for n := 0; r.qc.Context().Err() == nil; n++ {
				if n > 200_000 {
					t.Fatal("it goes on and on")
				}
				if c.name == "frames on the control stream" {
					_, _ = control.Write(varints(framePriorityUpdate, 1, 0))
				} else if c.repeat(r, s) != nil {
					break
				}
			}
			if code := r.ended(); code != ExcessiveLoad {
				t.Errorf("the connection ended with %v, want H3_EXCESSIVE_LOAD", code)
			}
			g.Reason(t, tunnel.Flood)
			most := mux.MeterBudget + int(time.Since(start).Seconds()*mux.MeterRefill) + 500
			switch c.name {
			case "requests that are refused, and not waited for":
				most = int(float64(most) / mux.CostRefused) // the answer may be first
			case "requests of 12 KiB that are refused":
				most /= 10
			case "passwords that are guessed":
				most = most/mux.CostGuess + DefaultStreams // as many may be under way
			}
			if n := len(g.Outcomes()); n > most {
				t.Errorf("%d requests got through, want at most %d", n, most)
			}
		})
	}
}

// try opens a request stream that begins with b, and gives it up.
func (r *raw) try(b []byte, reset bool) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), testTimeout)
	defer cancel()
	s, err := r.qc.OpenStreamSync(ctx)
	if err != nil {
		return err
	}
	_ = s.SetDeadline(time.Now().Add(testTimeout))
	_, _ = s.Write(b)
	if reset {
		s.CancelWrite(0x10c)
		s.CancelRead(0x10c)
		return nil
	}
	_, _ = io.Copy(io.Discard, s)
	_ = s.Close()
	return nil
}

// tunnelOf opens a tunnel.
func tunnelOf(r *raw) *rawStream {
	s := r.request(connectSvc...)
	s.answer()
	return s
}

// TestFloodHarmsNobodyElse: a connection that floods ends, and the one beside
// it does not notice.
func TestFloodHarmsNobodyElse(t *testing.T) {
	g := serve(t, tunneltest.Table{"svc:1": testnet.Echo(t).Addr()}, &Server{})
	bystander := open(t, newDialer(t, g.addr), "svc:1")
	r := rawClient(t, g.addr)
	for r.try(headOf(connectSvc...), true) == nil {
		testnet.Ping(t, bystander, "still here")
	}
	g.Reason(t, tunnel.Flood)
	testnet.Ping(t, bystander, "and after")
}
