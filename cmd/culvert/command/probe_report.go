package command

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"strings"
	"time"

	"culvert.dev/tunnel"
)

// A probeReport is what "culvert probe -o json" prints.
type probeReport struct {
	Target   string        `json:"target"`
	Via      string        `json:"via"`
	Mode     string        `json:"mode"`
	Reached  bool          `json:"reached"`
	Steps    []probeStep   `json:"steps"`
	Service  *probePeer    `json:"service,omitempty"`
	Refusal  *probeRefusal `json:"refusal,omitempty"`
	Hint     string        `json:"hint,omitempty"` // where nobody has refused
	Duration string        `json:"duration"`
}

type probeStep struct {
	Name   string `json:"name"`
	Took   string `json:"took"`
	Detail string `json:"detail,omitempty"`
	Error  string `json:"error,omitempty"`
}

// A probeRefusal is a no: the reasons are all those the answer may stand for.
type probeRefusal struct {
	Answer  string          `json:"answer"`
	Reasons []tunnel.Reason `json:"reasons,omitempty"`
	Hint    string          `json:"hint,omitempty"`
}

type probePeer struct {
	Version  string      `json:"tls"`
	ALPN     string      `json:"alpn,omitempty"`
	Identity string      `json:"identity,omitempty"`
	Verified bool        `json:"verified"`
	Problem  string      `json:"problem,omitempty"`
	Chain    []probeCert `json:"chain"`
}

type probeCert struct {
	Subject  string    `json:"subject"`
	Issuer   string    `json:"issuer"`
	SANs     []string  `json:"sans,omitempty"`
	NotAfter time.Time `json:"notAfter"`
	SHA256   string    `json:"sha256"`
}

func newProbePeer(state *tls.ConnectionState) *probePeer {
	peer := &probePeer{Version: tls.VersionName(state.Version), ALPN: state.NegotiatedProtocol}
	for i, c := range state.PeerCertificates {
		sum := sha256.Sum256(c.Raw)
		pc := probeCert{Subject: c.Subject.String(), Issuer: c.Issuer.String(), NotAfter: c.NotAfter, SHA256: hex.EncodeToString(sum[:])}
		for _, u := range c.URIs {
			pc.SANs = append(pc.SANs, u.String())
			if i == 0 && u.Scheme == "spiffe" && len(c.URIs) == 1 {
				peer.Identity = u.String()
			}
		}
		pc.SANs = append(pc.SANs, c.DNSNames...)
		for _, ip := range c.IPAddresses {
			pc.SANs = append(pc.SANs, ip.String())
		}
		peer.Chain = append(peer.Chain, pc)
	}
	return peer
}

func (r *probeReport) print(w io.Writer) {
	fmt.Fprintf(w, "%s via %s by %s\n", r.Target, r.Via, r.Mode)
	for _, s := range r.Steps {
		if s.Error != "" {
			fmt.Fprintf(w, "  %-14s %10s  %s %s\n", s.Name, s.Took, bad("failed:"), printable(s.Error))
			continue
		}
		fmt.Fprintf(w, "  %-14s %10s  %s\n", s.Name, s.Took, printable(s.Detail))
	}
	if p := r.Service; p != nil {
		identity := p.Identity
		if identity == "" {
			identity = "no SPIFFE identity"
		}
		fmt.Fprintf(w, "service: %s, %s\n", p.Version, printable(identity))
		for i, c := range p.Chain {
			fmt.Fprintf(w, "  %d subject %q issuer %q\n    names %s\n    until %s  sha256 %.16s\n", i, c.Subject, c.Issuer,
				printable(strings.Join(c.SANs, ", ")), c.NotAfter.UTC().Format(time.RFC3339), c.SHA256)
		}
	}
	if f := r.Refusal; f != nil {
		fmt.Fprintf(w, "%s %s\n", bad("refused:"), printable(f.Answer))
		if len(f.Reasons) > 0 {
			words := make([]string, len(f.Reasons))
			for i, x := range f.Reasons {
				words[i] = string(x)
			}
			fmt.Fprintf(w, "reason:  %s\n", strings.Join(words, " or "))
		}
		if f.Hint != "" {
			fmt.Fprintf(w, "hint:    %s\n", f.Hint)
		}
	}
	if r.Hint != "" {
		fmt.Fprintf(w, "hint:    %s\n", r.Hint)
	}
	if r.Reached {
		fmt.Fprintf(w, "%s in %s\n", good("reached"), r.Duration)
	} else {
		fmt.Fprintf(w, "%s after %s\n", bad("not reached"), r.Duration)
	}
}
