package enroll

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"culvert.dev/internal/testca"
	"culvert.dev/internal/testnet"
)

// A pipeDialer leads to a gateway, or nowhere.
type pipeDialer struct {
	g      *testGateway
	up     atomic.Bool
	dialed atomic.Int64
	all    sync.WaitGroup
}

func (d *pipeDialer) DialContext(context.Context, string, string) (net.Conn, error) {
	d.dialed.Add(1)
	if !d.up.Load() {
		return nil, errors.New("the network is down")
	}
	here, there := net.Pipe()
	d.all.Go(func() { d.g.serve(addressed{there}) })
	return addressed{here}, nil
}

// An addressed is one end of a pipe with an address as sockets have it.
type addressed struct{ net.Conn }

func (addressed) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 443} }

// A device without a network keeps its certificate and tries again; it renews as soon as it
// can, and says what to do once it is too late.
func TestRenewalWithoutNetwork(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "state")
	state := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ca, err := testca.New("corp.example", nil)
		if err != nil {
			t.Fatal(err)
		}
		g := &testGateway{ca: ca, folder: state, lifetime: 24 * time.Hour, addr: "gw.example:443"}
		if g.pair, err = ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/gw", TTL: 1000 * time.Hour}); err != nil {
			t.Fatal(err)
		}
		g.start(t)
		d := &pipeDialer{g: g}
		d.up.Store(true)
		if _, err := Join(t.Context(), d, g.invite(t, "cam"), "", folder, false); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		r := &Renewer{Dir: folder, Dialer: d}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = r.Run(ctx) })
		at := func(after time.Duration) RenewalStatus {
			time.Sleep(time.Until(begin.Add(after)))
			synctest.Wait()
			return r.Status()
		}
		d.up.Store(false)
		d.dialed.Store(0)
		if s := at(11 * time.Hour); s.Problem != "" || d.dialed.Load() != 0 || s.Device != "cam" || s.Expires.Sub(begin.Add(24*time.Hour)).Abs() > time.Minute {
			t.Errorf("before half of its life: %+v, %d connections", s, d.dialed.Load())
		}
		s := at(22 * time.Hour)
		if !strings.Contains(s.Problem, "the network is down") || s.Since.IsZero() {
			t.Errorf("without a network: %+v", s)
		}
		if d.dialed.Load() < 50 || d.dialed.Load() > 300 {
			t.Errorf("%d connections in 10 hours", d.dialed.Load())
		}
		d.up.Store(true)
		if s := at(22*time.Hour + 6*time.Minute); s.Problem != "" || s.Expires.Before(begin.Add(45*time.Hour)) {
			t.Errorf("with a network again: %+v", s)
		}
		d.up.Store(false)
		if s := at(80 * time.Hour); !strings.Contains(s.Problem, "has expired") || !strings.Contains(s.Problem, "join again") {
			t.Errorf("after too long: %+v", s)
		}
		d.up.Store(true)
		if s := at(81 * time.Hour); !strings.Contains(s.Problem, "has expired") {
			t.Errorf("with a network, too late: %+v", s)
		}
		if _, err := Join(t.Context(), d, g.invite(t, "cam"), "", folder, true); err != nil {
			t.Fatalf("joining again: %v", err)
		}
		if s := at(82 * time.Hour); s.Problem != "" || s.Expires.Before(begin.Add(100*time.Hour)) {
			t.Errorf("after joining again: %+v", s)
		}
		cancel()
		running.Wait()
		d.all.Wait()
	})
}

// A device that slept when its certificate was to be renewed renews it within a minute, though
// the timer stood still. One with a clock that is ahead does not ask for one after another.
func TestRenewalAfterSuspension(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "state")
	state := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ca, err := testca.New("corp.example", nil)
		if err != nil {
			t.Fatal(err)
		}
		g := &testGateway{ca: ca, folder: state, lifetime: 24 * time.Hour, addr: "gw.example:443"}
		if g.pair, err = ca.Issue(testca.Options{SPIFFEID: "spiffe://corp.example/gw", TTL: 1000 * time.Hour}); err != nil {
			t.Fatal(err)
		}
		g.start(t)
		d := &pipeDialer{g: g}
		d.up.Store(true)
		if _, err := Join(t.Context(), d, g.invite(t, "cam"), "", folder, false); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		var clock testnet.Clock // of the device
		r := &Renewer{Dir: folder, Dialer: d, now: clock.Now}
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { _ = r.Run(ctx) })
		at := func(after time.Duration) RenewalStatus {
			time.Sleep(time.Until(begin.Add(after)))
			synctest.Wait()
			return r.Status()
		}
		d.dialed.Store(0)
		if s := at(3 * time.Hour); s.Problem != "" || d.dialed.Load() != 0 {
			t.Errorf("before half of its life: %+v, %d connections", s, d.dialed.Load())
		}
		clock.Jump(11 * time.Hour)
		if s := at(3*time.Hour + time.Minute); s.Problem != "" || d.dialed.Load() != 1 || s.Expires.Before(begin.Add(26*time.Hour)) {
			t.Errorf("a minute after eleven hours of sleep: %+v, %d connections", s, d.dialed.Load())
		}
		clock.Jump(7 * time.Hour) // which the gateway's has not
		if s := at(5 * time.Hour); !strings.Contains(s.Problem, "the clock of this device is ahead") || d.dialed.Load() != 2 {
			t.Errorf("with a clock that is wrong: %+v, %d connections", s, d.dialed.Load())
		}
		clock.Jump(-18 * time.Hour)
		if s := at(8 * time.Hour); s.Problem != "" || d.dialed.Load() != 2 {
			t.Errorf("after the clock was set back: %+v, %d connections", s, d.dialed.Load())
		}
		cancel()
		running.Wait()
		d.all.Wait()
	})
}

// A folder that is damaged is said to be, and a running Renewer goes on.
func TestDamagedFolder(t *testing.T) {
	g := newGateway(t)
	folder, m, err := join(t, g.invite(t, "cam"), "")
	if err != nil {
		t.Fatal(err)
	}
	r := &Renewer{Dir: folder, Dialer: new(net.Dialer)}
	if due, err := r.once(t.Context()); err != nil || time.Until(due) < 20*time.Minute {
		t.Errorf("due at %v, %v", due, err)
	}
	path := filepath.Join(folder, IdentityFile)
	own, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string][]byte{IdentityFile: own[:len(own)/2], BundleFile: nil, membershipFile: []byte("{}")} {
		file := filepath.Join(folder, name)
		was, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := r.once(t.Context()); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("%s is damaged: %v", name, err)
		}
		if err := os.WriteFile(file, was, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := read(folder, m); err != nil {
		t.Error(err)
	}
}
