// Command dns answers every query for addresses with its own and the client's,
// and any other with nothing. It stands in for the coredns of the conformance
// suite's pods, whose answers are not looked at.
package main

import (
	"fmt"
	"net"
	"os"

	"github.com/miekg/dns"
)

func main() {
	errs := make(chan error)
	for _, network := range []string{"udp", "tcp"} {
		server := &dns.Server{Addr: ":53", Net: network, Handler: dns.HandlerFunc(answer)}
		go func() { errs <- server.ListenAndServe() }()
	}
	fmt.Fprintln(os.Stderr, "dns:", <-errs)
	os.Exit(1)
}

func answer(w dns.ResponseWriter, query *dns.Msg) {
	reply := new(dns.Msg).SetReply(query)
	for _, q := range query.Question {
		if q.Qtype != dns.TypeA {
			continue
		}
		for _, addr := range []net.Addr{w.LocalAddr(), w.RemoteAddr()} {
			host, _, err := net.SplitHostPort(addr.String())
			if ip := net.ParseIP(host).To4(); err == nil && ip != nil {
				reply.Answer = append(reply.Answer, &dns.A{
					Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1},
					A:   ip,
				})
			}
		}
	}
	_ = w.WriteMsg(reply)
}
