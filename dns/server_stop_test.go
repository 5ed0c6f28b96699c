package dns

import (
	"context"
	"fmt"
	"net"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
)

func TestShutdown(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1", "b.test. 60 IN A 192.0.2.2", "c.test. 60 IN A 192.0.2.3", "d.test. 60 IN A 192.0.2.4")
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { arrived <- struct{}{}; <-release; return false })
	r := start(t, &Server{Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback})
	idle, err := net.Dial("tcp", r.addr[TCP])
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	var wg sync.WaitGroup
	for i, tr := range transports {
		name := string(rune('a'+i)) + ".test"
		wg.Go(func() {
			r.expect(t, tr, q(name, dns.TypeA), fmt.Sprintf("NOERROR ra an: %s. 60 IN A 192.0.2.%d", name, i+1))
		})
	}
	for range transports {
		<-arrived
	}
	done := make(chan error, 2)
	for range 2 {
		go func() { done <- r.Shutdown(context.Background()) }()
	}
	_ = idle.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := idle.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("an idle connection: %v, want its end", err)
	}
	select {
	case <-done:
		t.Error("Shutdown returned before the last answer")
	default:
	}
	close(release)
	wg.Wait()
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	if _, err := net.Dial("tcp", r.addr[TCP]); err == nil {
		t.Error("a connection was taken after Shutdown")
	}
}

func TestShutdownHasAnEnd(t *testing.T) {
	up := serve(t, "a.test. 60 IN A 192.0.2.1")
	arrived, release := make(chan struct{}, 10), make(chan struct{})
	up.do(func(dns.ResponseWriter, *dns.Msg) bool { arrived <- struct{}{}; <-release; return true })
	defer close(release)
	r := start(t, &Server{Forward: &Forwarder{Upstreams: []Upstream{{Addr: up.addr}}}, RecursionClients: loopback})
	c, err := net.Dial("udp", r.addr[UDP])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b, _ := q("a.test", dns.TypeA).Pack()
	_, _ = c.Write(b)
	<-arrived
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := r.Shutdown(ctx); err != context.Canceled {
		t.Errorf("%v, want context.Canceled", err)
	}
}

func TestAnswersLeaveFromWhereTheyWereAsked(t *testing.T) {
	for _, network := range []string{"udp4", "udp6"} {
		ip := net.IPv4(127, 0, 0, 1)
		if network == "udp6" {
			ip = net.IPv6loopback
		}
		c, err := net.ListenUDP(network, &net.UDPAddr{IP: ip})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if !pinReplies(c) {
			if runtime.GOOS == "linux" {
				t.Errorf("%s: the system does not tell", network)
			}
			continue
		}
		client, err := net.DialUDP(network, nil, c.LocalAddr().(*net.UDPAddr))
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if _, err := client.Write([]byte("?")); err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_ = client.SetDeadline(time.Now().Add(10 * time.Second))
		b, oob := make([]byte, 10), make([]byte, 128)
		_, n, _, from, err := c.ReadMsgUDPAddrPort(b, oob)
		if err != nil {
			t.Fatal(err)
		}
		back := replyFrom(oob[:n])
		var m4 ipv4.ControlMessage
		var m6 ipv6.ControlMessage
		if network == "udp4" {
			// The source to be used is where the system writes the destination.
			if err := m4.Parse(back); runtime.GOOS == "linux" && err != nil || len(back) == 0 {
				t.Errorf("%s: %x, %v", network, back, err)
			}
		} else if err := m6.Parse(back); err != nil || !m6.Dst.Equal(ip) {
			t.Errorf("%s: from %v, %v, want %v", network, m6.Dst, err, ip)
		}
		if _, _, err := c.WriteMsgUDPAddrPort([]byte("!"), back, from); err != nil {
			t.Errorf("%s: %v", network, err)
		}
		if _, err := client.Read(b); err != nil || b[0] != '!' {
			t.Errorf("%s: %q, %v", network, b[:1], err)
		}
	}
	if replyFrom(nil) != nil || replyFrom([]byte{1, 2, 3}) != nil {
		t.Error("an address out of nothing")
	}
}
