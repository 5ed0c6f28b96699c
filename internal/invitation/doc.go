// Package invitation has what tokens of "culvert invite" need, whatever they invite to: their
// text, the gateway that they lead to, the state in which a gateway keeps hashes of their
// secrets, and the conversation in which one is used.
//
//	t, err := invitation.New(invitation.Device, "gw.example:443", "connect-h2", leaf, time.Hour)
//	text, err := t.Text()                       // for the device or site that is invited
//	t, err = invitation.Parse(text, time.Now()) // there
//	c, state, err := t.Dial(ctx, dialer, "enroll.culvert.alt")
//
// Dial verifies the public key of the gateway by the token before anything is sent. The
// messages that follow are those of the packages that use this one.
package invitation
