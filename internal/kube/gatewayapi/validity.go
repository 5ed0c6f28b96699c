package gatewayapi

import (
	"cmp"
	"crypto/tls"
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

// periodOf returns the period of a certificate.
func periodOf(c *tls.Certificate) period {
	return period{cmp.Or(strings.Join(c.Leaf.DNSNames, ", "), c.Leaf.Subject.String()), c.Leaf.NotBefore, c.Leaf.NotAfter}
}

// notValid returns which of l's certificates are not valid at the time of the Inputs, and which will
// expire soon; each is "" if there are none. A translation is due when that changes.
func (t *translator) notValid(l *listener) (not, soon string) {
	if t.in.Now.IsZero() || l.ends == nil {
		return "", ""
	}
	var texts, ending []string
	for _, key := range l.ends.Keys {
		p := periodOf(t.res.Keys[key])
		switch now := t.in.Now; {
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
