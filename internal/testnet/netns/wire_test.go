//go:build linux && netns

package netns

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// Bytes of TCP arrive exactly whatever a Wire does to the packets, and it does it.
func TestWire(t *testing.T) {
	west, east := New(t, "west"), New(t, "east")
	w := NewWire(t, west, "10.9.0.1/24", east, "10.9.0.2/24")
	ln, err := east.Listen("tcp", "10.9.0.2:443")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
	sent := bytes.Repeat([]byte("0123456789abcdef"), 8<<10)
	for _, tt := range []struct {
		name string
		fate func(n int) Fate
		want func(s WireStats) bool
	}{
		{"nothing", nil, func(s WireStats) bool { return s.Carried > 0 && s.Lost+s.Late+s.Twice+s.Spoiled == 0 }},
		{"lost", func(n int) Fate { return Fate{Lost: n%20 == 0} }, func(s WireStats) bool { return s.Lost > 0 }},
		{"late", func(n int) Fate { return Fate{After: time.Duration(n%3) * time.Millisecond} }, func(s WireStats) bool { return s.Late > 0 }},
		{"twice", func(n int) Fate { return Fate{Twice: n%5 == 0} }, func(s WireStats) bool { return s.Twice > 0 }},
		{"spoiled", func(n int) Fate { return Fate{Spoil: n%20 == 0} }, func(s WireStats) bool { return s.Spoiled > 0 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := 0
			w.SetFate(nil)
			if tt.fate != nil {
				w.SetFate(func(int) Fate { n++; return tt.fate(n) })
			}
			c, err := west.Dial(t.Context(), "tcp", "10.9.0.2:443")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			go func() {
				_, _ = c.Write(sent)
				_ = c.(*net.TCPConn).CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, sent) {
				t.Errorf("%d of %d bytes came back, %v", len(got), len(sent), err)
			}
			if s := w.Stats(); !tt.want(s) {
				t.Errorf("it did %+v", s)
			}
		})
	}
}
