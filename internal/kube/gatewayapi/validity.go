package gatewayapi

import (
	"crypto/x509"
	"encoding/pem"
	"strings"
	"time"
)

// A certificate that is not valid yet, or has expired, is still served: clients decide whether they
// accept it, and their clocks may be right if ours is wrong. The message of a condition says so, for
// whoever looks why clients fail.

// reasonCertificateNotValid is no reason of a condition: Gateway API has none.
const reasonCertificateNotValid = "CertificateNotValid"

// reasonCertificateExpiresSoon is none either. The gateway logs it.
const reasonCertificateExpiresSoon = "CertificateExpiresSoon"

// soonBefore is how long before its end a certificate is reported. If it is valid for less than five
// times as long, it is reported for the last fifth of its validity.
const soonBefore = 7 * 24 * time.Hour

// soon returns the time from which the end of p is reported.
func (p period) soon() time.Time { return p.end.Add(-min(soonBefore, p.end.Sub(p.from)/5)) }

// A period is the time for which a certificate is valid.
type period struct {
	of        string // its owner, for people
	from, end time.Time
}

// periodOf returns the period of the first certificate of a chain; zero if there is none.
func (m *memo) periodOf(chain string) period {
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.periods) > 10_000 {
		clear(m.periods)
	}
	if m.periods == nil {
		m.periods = map[string]period{}
	}
	p, ok := m.periods[chain]
	if ok {
		return p
	}
	if block, _ := pem.Decode([]byte(chain)); block != nil {
		if leaf, err := x509.ParseCertificate(block.Bytes); err == nil {
			p = period{strings.Join(leaf.DNSNames, ", "), leaf.NotBefore, leaf.NotAfter}
			if p.of == "" {
				p.of = leaf.Subject.String()
			}
		}
	}
	m.periods[chain] = p
	return p
}

// notValid returns which of l's certificates are not valid at the time of the Inputs, and which will
// expire soon; each is "" if there are none. A translation is due when that changes.
func (t *translator) notValid(l *listener) (not, soon string) {
	if t.in.Now.IsZero() || l.ends == nil {
		return "", ""
	}
	var texts, ending []string
	for i := range l.ends.Certificates {
		p := t.memo.periodOf(l.ends.Certificates[i].Certificate)
		switch now := t.in.Now; {
		case p.end.IsZero():
		case now.Before(p.from):
			t.until(p.from)
			texts = append(texts, "the certificate for "+p.of+" is not valid before "+p.from.UTC().Format(time.RFC3339))
		case now.After(p.end):
			texts = append(texts, "the certificate for "+p.of+" has not been valid since "+p.end.UTC().Format(time.RFC3339))
		case now.Before(p.soon()):
			t.until(p.soon())
		default:
			t.until(p.end)
			ending = append(ending, "the certificate for "+p.of+" expires at "+p.end.UTC().Format(time.RFC3339))
		}
	}
	return strings.Join(texts, "; "), strings.Join(ending, "; ")
}

// until makes a translation due at a time.
func (t *translator) until(at time.Time) {
	at = at.Add(time.Second) // clearly after it
	if t.res.Until.IsZero() || at.Before(t.res.Until) {
		t.res.Until = at
	}
}
